"""A settings document, validated: start at `parse`; each section has its reader."""
