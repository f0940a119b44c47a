"""`headrace-admin`: what operators see of the queue, and do to it. See `docs/admin.md`.

Each command is a function from the queue to a document; `text` makes a document readable. What a
client asked (a job's body) is taken out on the server and never gets here.
"""
