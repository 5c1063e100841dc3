"""The flight recorder: the last calls of each rank, for when a job hangs or fails.

A rank writes its file on an error of a collective, on SIGUSR1, and by
`collectives.dump_flight_record`. `python -m collectives.flight FILES` joins the ranks' files and
names the rank for which the others wait.
"""
