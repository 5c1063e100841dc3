"""Horovod's functions, under Horovod's names and with Horovod's meaning."""
