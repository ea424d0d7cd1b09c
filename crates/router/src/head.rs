//! Heads on their way through: what belongs to one hop goes, what the workload should know comes.

use http::header::{
    CONNECTION, CONTENT_TYPE, COOKIE, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, TE, UPGRADE,
};
use http::request::Parts;
use http::uri::{PathAndQuery, Scheme};
use http::{Method, Request, Uri, Version};

use crate::target::TARGET_PREFIX;

static FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// The protocol that an HTTP/1.1 request asks to switch to.
pub(crate) fn upgrade_of(parts: &Parts) -> Option<HeaderValue> {
    let protocol = parts.headers.get(UPGRADE)?;
    let asked = parts.version == Version::HTTP_11 && tokens(&parts.headers, &CONNECTION).any(is("upgrade"));
    asked.then(|| protocol.clone())
}

/// gRPC proper, which lives from trailers and so from HTTP/2; gRPC-web is made for those without and passes as HTTP.
pub(crate) fn is_grpc(parts: &Parts) -> bool {
    if parts.version != Version::HTTP_2 {
        return false;
    }
    let kind = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    matches!(kind.and_then(|kind| kind.strip_prefix(b"application/grpc")), Some([] | [b'+' | b';' | b' ', ..]))
}

/// The bytes a head holds in memory, near enough to bound many of them.
pub(crate) fn size_of(headers: &HeaderMap, uri: &Uri) -> usize {
    let path = uri.path_and_query().map_or(0, |path| path.as_str().len());
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum::<usize>() + path + 256
}

/// Makes a client's request head one for the workload, but for what depends on the protocol spoken there.
pub(crate) fn rewrite_request(parts: &mut Parts, host: &HeaderValue, client: &HeaderValue) {
    let headers = &mut parts.headers;
    // Most heads hold nothing of the kind, and one look at each name is cheaper than a search for each of ours.
    let (mut hop, mut ours, mut claims) = (false, false, false);
    for name in headers.keys() {
        hop |= is_hop_by_hop(name);
        ours |= name.as_str().starts_with(TARGET_PREFIX);
        claims |= name == FORWARDED || name == FORWARDED_FOR;
    }
    if hop {
        let trailers = tokens(headers, &TE).any(is("trailers"));
        strip(headers);
        if trailers {
            headers.insert(TE, HeaderValue::from_static("trailers"));
        }
    }
    if ours {
        let ours: Vec<_> = headers.keys().filter(|name| name.as_str().starts_with(TARGET_PREFIX)).cloned().collect();
        ours.iter().for_each(|name| drop(headers.remove(name)));
    }
    if parts.version == Version::HTTP_2 {
        join_cookies(headers);
    }
    let chain = if claims { append(headers, &FORWARDED_FOR, client) } else { client.clone() };
    headers.insert(&FORWARDED_FOR, chain);
    headers.insert(&FORWARDED_HOST, host.clone());
    headers.insert(&FORWARDED_PROTO, HeaderValue::from_static("http"));
    if claims {
        // We say it in the older words above; left in place, this would be the client's own claim.
        headers.remove(FORWARDED);
    }
}

/// HTTP/1.1 names the host in a header and the rest in the request line.
pub(crate) fn shape_for_http1<B>(request: &mut Request<B>, host: &HeaderValue) {
    *request.version_mut() = Version::HTTP_11;
    let uri = request.uri_mut();
    if uri.authority().is_some() {
        *uri = Uri::from(uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")));
        request.headers_mut().insert(HOST, host.clone());
    } else if !request.headers().contains_key(HOST) {
        request.headers_mut().insert(HOST, host.clone());
    }
}

/// HTTP/2 names all of it in the target. A host that is no authority cannot be said there, and is left to the header.
pub(crate) fn shape_for_http2<B>(request: &mut Request<B>, host: &HeaderValue) {
    *request.version_mut() = Version::HTTP_2;
    let mut target = request.uri().clone().into_parts();
    target.scheme = Some(Scheme::HTTP);
    target.authority = host.as_bytes().try_into().ok();
    target.path_and_query.get_or_insert_with(|| PathAndQuery::from_static("/"));
    if let Ok(absolute) = Uri::from_parts(target) {
        *request.uri_mut() = absolute;
        request.headers_mut().remove(HOST);
    }
}

/// Whether a request without a body may be sent twice: the second time has no effect that the first had not.
pub(crate) fn is_idempotent(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE)
}

pub(crate) fn ask_upgrade(headers: &mut HeaderMap, protocol: &HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol.clone());
}

pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.keys().any(is_hop_by_hop) {
        strip(headers);
    }
}

fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "transfer-encoding"
            | "upgrade"
    )
}

fn strip(headers: &mut HeaderMap) {
    let named = tokens(headers, &CONNECTION).filter_map(|token| token.parse().ok());
    let gone: Vec<HeaderName> = named.chain(headers.keys().filter(|name| is_hop_by_hop(name)).cloned()).collect();
    gone.iter().for_each(|name| drop(headers.remove(name)));
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

fn is(wanted: &'static str) -> impl Fn(&str) -> bool {
    move |token| token.split(';').next().is_some_and(|token| token.trim().eq_ignore_ascii_case(wanted))
}

fn append(headers: &HeaderMap, name: &HeaderName, last: &HeaderValue) -> HeaderValue {
    let mut joined = Vec::new();
    for value in headers.get_all(name).iter().chain([last]) {
        if !joined.is_empty() {
            joined.extend_from_slice(b", ");
        }
        joined.extend_from_slice(value.as_bytes());
    }
    HeaderValue::from_bytes(&joined).expect("header values joined by a comma are one")
}

/// HTTP/2 may send crumbs; servers of HTTP/1.1 read one header only.
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().nth(1).is_none() {
        return;
    }
    let crumbs: Vec<_> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    let joined =
        HeaderValue::from_bytes(&crumbs.join(&b"; "[..])).expect("header values joined by a semicolon are one");
    headers.insert(COOKIE, joined);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(version: Version, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri("http://a.b.localhost/x?y").version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn rewritten(version: Version, headers: &[(&str, &str)]) -> Vec<(String, String)> {
        let mut parts = parts(version, headers);
        rewrite_request(&mut parts, &HeaderValue::from_static("a.b.localhost"), &HeaderValue::from_static("10.0.0.9"));
        let mut left: Vec<_> =
            parts.headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_string())).collect();
        left.sort();
        left
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    const ADDED: [(&str, &str); 3] =
        [("x-forwarded-for", "10.0.0.9"), ("x-forwarded-host", "a.b.localhost"), ("x-forwarded-proto", "http")];

    #[test]
    fn what_belongs_to_one_hop_stays_there() {
        let sent = [
            ("connection", "close, X-Secret"),
            ("connection", "keep-alive"),
            ("x-secret", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-authorization", "Basic x"),
            ("proxy-connection", "close"),
            ("te", "gzip"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("ate-target-actor", "b/a"),
            ("ate-target-port", "80"),
            ("ate-target-whatever", "x"),
        ];
        assert_eq!(rewritten(Version::HTTP_11, &sent), pairs(&ADDED));
    }

    #[test]
    fn trailers_stay_asked_for() {
        let kept = rewritten(Version::HTTP_11, &[("te", "gzip;q=0.1, trailers"), ("connection", "te")]);
        assert!(kept.contains(&("te".into(), "trailers".into())));
    }

    #[test]
    fn a_clients_claims_about_itself_are_kept_apart_from_what_we_saw() {
        let spoofed = [
            ("x-forwarded-for", "1.1.1.1"),
            ("x-forwarded-for", "2.2.2.2"),
            ("x-forwarded-host", "evil"),
            ("x-forwarded-proto", "https"),
            ("forwarded", "for=3.3.3.3"),
        ];
        let mut expected = pairs(&ADDED);
        expected[0].1 = "1.1.1.1, 2.2.2.2, 10.0.0.9".into();
        assert_eq!(rewritten(Version::HTTP_11, &spoofed), expected);
        // Nor can they be made to vanish by calling them this hop's.
        let hidden = [("connection", "x-forwarded-for, x-forwarded-host"), ("x-forwarded-for", "1.1.1.1")];
        assert_eq!(rewritten(Version::HTTP_11, &hidden), pairs(&ADDED));
    }

    #[test]
    fn only_grpc_proper_over_http2_is_grpc() {
        for (version, content_type, expected) in [
            (Version::HTTP_2, "application/grpc", true),
            (Version::HTTP_2, "application/grpc+proto", true),
            (Version::HTTP_2, "application/grpc; x=y", true),
            (Version::HTTP_2, "application/grpc-web", false),
            (Version::HTTP_11, "application/grpc", false),
            (Version::HTTP_2, "text/plain", false),
        ] {
            assert_eq!(is_grpc(&parts(version, &[("content-type", content_type)])), expected, "{content_type}");
        }
    }
}
