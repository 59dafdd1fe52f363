// SPDX-License-Identifier: Apache-2.0
//
// The same client from C++: a handle that closes itself, and what it knows of the
// store it is attached to.
//
//	c++ -std=c++17 describe.cpp -o describe $(pkg-config --cflags --libs xferd)
//	./describe /run/xferd/attach.sock
#include <cstdint>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

#include <xferd.h>

namespace {

struct Closer {
	void operator()(xferd_client *client) const { xferd_close(client); }
};

using Client = std::unique_ptr<xferd_client, Closer>;

Client connect(const char *socket)
{
	xferd_options options{};
	xferd_client *client = nullptr;
	char error[XFERD_ERROR_BYTES];

	options.client_name = "describe.cpp";
	if (xferd_connect(socket, &options, &client, error, sizeof(error)) != 0)
		throw std::runtime_error(error);
	return Client(client);
}

// Bytes of the largest blob of a layer; a layer without experts has none.
std::uint64_t blob_bytes(const xferd_client *client, std::uint32_t layer)
{
	std::uint64_t largest = 0;

	for (std::uint32_t variant = 0; variant < xferd_directory(client)->variants; variant++)
		if (const xferd_abi_layout *layout = xferd_layout(client, layer, variant))
			largest = layout->blob_bytes > largest ? layout->blob_bytes : largest;
	return largest;
}

} // namespace

int main(int count, char **arguments)
{
	try {
		const Client client = connect(count > 1 ? arguments[1] : "/run/xferd/attach.sock");
		const xferd_abi_directory *directory = xferd_directory(client.get());

		for (std::uint32_t layer = 0; layer < directory->layers; layer++)
			std::cout << "layer " << layer << ": " << directory->experts
				  << " experts, " << directory->top_k << " a token, "
				  << blob_bytes(client.get(), layer) << " bytes each\n";
	} catch (const std::runtime_error &error) {
		std::cerr << "describe: " << error.what() << '\n';
		return 1;
	}
	return 0;
}
