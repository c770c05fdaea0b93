"""A virtual device: a minimal Debian that boots systemd beside the machine it runs on (SPEC 10).

    image       the root file system, made once by mmdebstrap and cached by its inputs
    device      one device: its folder, keys, ssh_config; up, down, who supervises it
    qemu        how a root boots as a virtual machine under software emulation
    inside      what runs in the device's own namespaces: overlay, network, the boot loop
    proxy       the way in: a relay from SSH into the network namespace

It is crash-only. One process owns mounts, network and every process of a device through namespaces of its own; when
that process dies, however it dies, all of it is gone, and only the device's folder below `build/devices` is left.
Nothing but the standard library is imported, so that any Python 3.11 runs it.
"""
