"""Power cuts: a virtual machine on a disk that forgets what was not flushed, and a client outside that remembers.

    disk        the disk: what is written lies in memory until a flush; pure
    nbd         the disk as a network block device, for QEMU
    guest       process 1 of the machine: loopd, and a way in
    relay       streams between sockets, on either side
    machine     its disk image with the release of the device under check; boot, cut
    witness     what a client was told is durable, and whether it is there

Killing QEMU over a file would prove only that fdatasync was called: what the guest has sent lies in this machine's
page cache. Here the disk is cut first, at one instant, and then everything behind it is killed.
"""
