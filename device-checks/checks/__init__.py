"""What the checks are made of.

pinned      SSH by paramiko that refuses a host key that is not the known one
device      the device under check: commands with a deadline, JSON, waiting, the lease
second      a second instance of loopd on the device, for what must not be done to the installed one
account     tokens recomputed from the model server's own numbers
stages      the stage the device is in; the first failure latches
report      the table, the JSON file and the page
"""
