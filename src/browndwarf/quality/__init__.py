"""Quality gates: is a faster setup still the same model?

Perplexity, divergence from a reference, losslessness of speculation, and a quiz with mechanical
graders. Jobs take engine objects and return frozen records; nothing here prints.
"""
