"""The kernel side: plans, datapaths, and the raw readers under them."""
