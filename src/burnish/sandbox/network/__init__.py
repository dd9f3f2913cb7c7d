"""The network of a box: nothing but the names on its allow list.

    job in the box --127.0.0.1:3128--> listening socket --accepted on the host by--> proxy.py
      (no other route: the namespace     made in the box by its init, from outside    |
       has a loopback and nothing else)  by its keeper, or by relay.py (gVisor)       v
                                                                               connection.py
      ask.py, http_head.py, socks.py        what does the client want?                |
      policy.py                             is it on the list?                        |
      upstream.py, addresses.py             resolve once, choose, pin, dial           |
      inspection.py, tls.py, http_body.py   do its first bytes say the same?          |
      events.py                             every decision, as a record, to a sink  <-'

`provider.py` is the way in. What is enforced: name and port are on the list; the name is resolved
here, once, and only then; the address is public (`private` names the exceptions); the server name
in a TLS hello is the name that was asked for; plain HTTP is one request with one fitting Host.

What cannot be: TLS is not opened, so a server with several names may be asked for another of them
inside (domain fronting); a wildcard lets a box send data in the labels of names that it looks up;
whoever runs an allowed host receives what the box sends. List hosts that you trust with all that is
in the box.
"""
