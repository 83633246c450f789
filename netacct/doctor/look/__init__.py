"""Looking: thin readers that gather facts and change nothing. What they parse, they parse in pure functions.

Everything is looked up for the calling thread (/proc/thread-self), so that it may be in a namespace of its own.
"""
