"""The command `adasum demo`: what the library does, shown in a minute on this machine's CPUs."""
