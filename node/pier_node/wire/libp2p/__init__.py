"""The libp2p carrier, through hivemind: for sites that cannot open a port."""
