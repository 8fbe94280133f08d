"""Try every model type of transformers: see :mod:`tools.model_matrix.matrix`."""

import sys

from tools.model_matrix.matrix import main

sys.exit(main())
