"""Checks that all ranks have the same parameters and settings."""
