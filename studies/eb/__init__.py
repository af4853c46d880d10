"""How well EB does, online EB and EB+ choose, EB's memory holds and its gap promise is kept."""
