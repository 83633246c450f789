"""From counter readings to monotonic totals, and their store."""
