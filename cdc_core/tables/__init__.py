"""Tables without Delta's engine: location and names (`layout`), ownership (`claims`), definition (`definition`), deletion
vectors.
"""
