"""A settings document, validated: `parse` is the way in, each section has its reader."""
