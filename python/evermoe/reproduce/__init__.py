"""The numbers of the five papers beside those that evermoe's planners compute, figure by figure.

A number is quoted only where our copy of the paper states it in its text, with the place. What evermoe says of the same
setting is computed when a row is asked for.
"""
