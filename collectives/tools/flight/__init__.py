"""The flight recorder's files: each rank's latest calls, for jobs that hang or fail.

Ranks write their files on errors of collectives, in `Group.abort`, on SIGUSR1 and SIGTERM, and by
`collectives.dump_flight_record`. `python -m collectives.flight FILES` joins the ranks' files and
names the rank at fault.
"""
