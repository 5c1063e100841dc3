"""Whether ranks agree: on parameters, settings, and which parameters there are."""
