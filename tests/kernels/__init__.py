"""Tests of the one-device kernels."""
