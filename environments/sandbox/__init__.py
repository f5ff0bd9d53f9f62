"""Commands of a policy: each with a deadline and a view of the file system, and the folder that they leave behind.

Reading order: ``command`` (starts one and waits), ``runner`` (the program in between, which bounds it), ``folder``
(takes a picture of a folder and sets it up again). Nothing here knows an environment.
"""
