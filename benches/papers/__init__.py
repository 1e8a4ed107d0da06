"""Published numbers of the five papers, compared with those that evermoe's planners compute, figure by figure.

A number is quoted only if our copy of the paper states it in its text, with its place. evermoe's number for the same
setting is computed when a row is requested.
"""
