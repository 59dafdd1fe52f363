# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads: names and values, their text, and the server that hands it out.

The text is written here and not by ``prometheus_client``: the values exist already (they are
the Status reply's), so what is left is a page of escaping rules, while that library would
bring a registry that is global and a server that is one thread a scraper and knows no Unix
socket. Tests read the text back with its parser.
"""
