"""The page at `/`."""

import re


def test_the_page_is_whole_and_may_run_nothing_else(server):
    reply = server.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    (nonce,) = re.findall(r"'nonce-([\w-]+)'", policy)
    assert f'<script nonce="{nonce}">' in reply.text
    assert "default-src 'none'" in policy
    # Nothing comes from elsewhere, and text of the model never becomes markup.
    assert not re.search(r"""(src|href)\s*=|https?://|innerHTML|insertAdjacentHTML""", reply.text)
    again = server.get("/").headers["content-security-policy"]
    assert again != policy


def test_the_page_can_be_switched_off(launch):
    assert launch("--no-ui").get("/").status_code == 404
