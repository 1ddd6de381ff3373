"""The change stream without a server: which events are captured (`filters`), what stays of them (`fields`), what their tokens say."""
