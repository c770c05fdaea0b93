"""The model server: its client, its slots, the embedded one, the scripted one, and what its template does (SPEC 4).

wire, completion    what is sent and received: pure
client              requests, time-outs, typed errors
slots               who uses which slot, in what order
states, statefiles, statestore, keeper
                    what a slot holds: chosen (pure), on disk, within bounds, saved and restored around requests
account, tally      what a request cost and why; what all of them did
rendering, forms, identity, check, watch, measure
                    what is served, and what its template takes
server, templates, catalog
                    llama.cpp's own server from a wheel, with a template and a model
script, scripted    a server that plays answers from a file
"""
