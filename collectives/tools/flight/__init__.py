"""The flight recorder's files: each rank's latest calls, for jobs that hang or fail.

Ranks write their files on errors of collectives, in `Group.abort`, on SIGUSR1 and SIGTERM, by
`collectives.dump_flight_record`, and if ADASUM_FLIGHT_FOLDER is set, on any rank's timeout.
`python -m collectives.flight FILES` joins the ranks' files and names the rank at fault.
"""
