"""Programs that the checks give to a second loopd as tools; each runs by itself, on the device's own Python.

probe       says what a tool can see and do where it runs
linger      leaves a grandchild behind that will not end, and does not end itself
mcp_server  an MCP server over stdio that says where it runs
"""
