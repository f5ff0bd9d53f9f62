"""The routes, one module for each resource. They read the request, call the store and show what it says."""
