"""Reports as one self-contained HTML page.

:mod:`~shardconv.html.page` writes it from the files in ``assets`` and the reports as ``--json`` prints them, where the
tensors of a plan are in a compact form.
"""
