"""What sweeps of nodes and of the command line share: plan, keys, store, figures."""
