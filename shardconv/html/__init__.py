"""Reports as one self-contained HTML page.

:mod:`~shardconv.html.page` writes the page, from the files in ``assets``; :mod:`~shardconv.html.tensors` makes the
compact form of a plan that the page reads. All else in the page is a report as ``--json`` prints it.
"""
