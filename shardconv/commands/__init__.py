"""The commands of the command line, and the options and reports that they share."""
