"""The OpenAI API's request and response bodies, and files of them."""
