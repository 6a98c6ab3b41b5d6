"""`spectrain follow`: a drafter that keeps up with its traffic. It listens, watches, trains,
proves and swaps.
"""
