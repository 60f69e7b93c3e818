"""Limits of tenants, projects and keys: requests, tokens and money in a window of time, and requests at once.

    limiter.py    what a request goes through: admit, reserve, settle
    book.py       which limits a caller has, read from the tables
    meters.py     one limit, and what is used of it
    charges.py    what its tokens cost (`serving/counting.py`: which of them are charged)
    lengths.py    how long answers become of which the client did not say it
    counters.py   counting in this process, exactly
    shared.py     counting for several gateways, in Redis: `line.py`, `counters.lua`; without it: `local_share.py`
    refusals.py   how a client is told
    headers.py    x-ratelimit-…

A request takes from all limits that apply, or from none: requests and parallel when it comes, tokens and money once its
prompt is known, as an estimate. When it has ended, however, the estimate is replaced by what it really was. So a window
is overrun by no more than the sum, over the requests in flight, of what each turned out to be above its estimate: by
nothing where the client says how long its answer may be and its prompt was counted exactly.

A request belongs to the window it began in, and to no other. Requests that a limit refused are counted nowhere; those
that an engine or the gateway failed count as requests, and no tokens and no money. Windows follow one another without
overlap: around the moment where one ends up to twice the amount may pass in a short time.

With Redis its clock says which window it is. A gateway that dies gives back what its requests had reserved when their
leases end (`shared.LEASE_S`). While Redis is away:

    requests, tokens     local_share: what was left when Redis was last heard, divided by the gateways alive then;
                         of a window that begins meanwhile, the limit divided by them
    parallel             the same of what was free
    money                the same; but a budget of which this gateway has never heard from Redis is refused with 503
    refuse               503 until Redis is back
    allow                let in, and counted

What was used meanwhile is added in Redis as soon as it is back. After an outage longer than a lease, requests that were
in flight all the time may not be counted as parallel, and what they reserved is not, until they end. A gateway that
starts while Redis is away thinks itself alone. Shares are of what each gateway heard last, so that in the window in
which Redis went they may add up to a little more than what was left.
"""
