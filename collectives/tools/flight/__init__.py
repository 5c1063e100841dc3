"""The flight recorder's files: what each rank did last, for when a job hangs or fails.

A rank writes its file on an error of a collective, in `Group.abort`, on SIGUSR1 and
SIGTERM, and by `collectives.dump_flight_record`. `python -m collectives.flight FILES` joins the
ranks' files and names the rank at fault.
"""
