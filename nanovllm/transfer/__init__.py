"""Transfer of cached pages from a prefill engine (P) to a decode engine (D).

P and D are two servers. A router sends a request to P, which computes the prompt and answers with
an object. The router passes the object to D, which reads the pages from P and generates the text.
"""
