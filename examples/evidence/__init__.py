"""Trainings with many ways to reduce, their results, and the tables and plots made of these.

PYTHONPATH=examples python -m evidence --help
"""
