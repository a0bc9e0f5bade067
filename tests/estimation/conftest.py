"""Tests of estimation import modules of benchmarks."""

import sys

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
