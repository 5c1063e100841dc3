"""Collectives as plain data: schedules, algorithms that generate them, and their verification."""
