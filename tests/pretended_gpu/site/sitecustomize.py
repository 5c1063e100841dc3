"""Gives every Python that finds this folder the pretended GPU: see tests/pretended_gpu."""

from tests.pretended_gpu import pretend

pretend.install()
