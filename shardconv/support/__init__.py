"""What every package uses: errors, exit codes, the console, lazy imports. Imports no other package."""
