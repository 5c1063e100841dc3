"""Do all ranks make the same call? Descriptions of calls and their negotiation."""
