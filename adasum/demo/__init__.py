"""The command `adasum demo`: the library in a minute on this machine's CPUs."""
