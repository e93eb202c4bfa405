"""`agentfly view`: a local web page over run directories, outputs of `agentfly eval` and saved trajectories.

    sources.py   the files: which chains they hold, and curves of their metrics
    index.py     the chains in SQLite: filters, full-text search; follows files that grow
    chains.py    one chain for the page: conversation, tokens, and why a token is trained or not
    server.py    HTTP on loopback, with a token in the URL
    export.py    a selection as one static page
    static/      the page: plain JavaScript modules and CSS, without a build step

The viewer only reads: a run is shown while it is written.
"""
