"""Collectives as plain data: schedules, the algorithms that generate them, their verification."""
