"""Registered environments as files: versions and reports (``registry``), uploads (``archives``), the URLs that a config
names (``named_urls``). Nothing here runs or imports what it keeps.
"""
