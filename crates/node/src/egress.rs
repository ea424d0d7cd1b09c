//! Connections out of actors, dialled here where policy allows. The worker has checked the template's rules; this side
//! checks them again and refuses what no rule may allow: the host itself, its neighbours by link, its metadata service.
