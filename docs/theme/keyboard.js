// Lets a keyboard scroll what is wider than the screen, and names the buttons of each code block.
document$.subscribe(() => {
  document.querySelectorAll('.md-typeset__scrollwrap, pre > code').forEach((part) => {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0
  })
  document.querySelectorAll('.md-code__nav').forEach((nav, i) => nav.setAttribute('aria-label', `Code block ${i + 1}`))
})
