"""Saved records as something to look at: charts, and one HTML page of a sweep.

Above the jobs, whose figures it shows and computes none of anew; below the command line, which
gives it the sentences that the terminal shows too. Reads run directories and writes nothing.
"""
