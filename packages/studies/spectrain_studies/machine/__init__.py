"""What a user measures on her own machine, and what the machine lacks. The project's own
measurements are in lab/.
"""
